"""Pictures of layers and heads, and the numbers behind them."""
