"""What more than one command of this package uses: the backend, the layers, and records."""
