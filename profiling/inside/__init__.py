"""Inside a model: captured queries, keys and values, gradients, residual stream, attention."""
