"""What goes on inside a model: captured queries, keys and values, gradients, the residual stream,
attention rows."""
