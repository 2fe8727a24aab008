"""What is chosen for decode: the layers that filter, and the tokens that each KV head keeps."""
