"""What more than one command of this package uses: the backend, the gate, records, and the report."""
