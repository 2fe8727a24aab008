"""Pictures of layers, heads and artifacts, and the numbers behind them."""
