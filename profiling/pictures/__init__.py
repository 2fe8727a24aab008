"""Pictures and pages: charts, heatmaps, and the numbers behind them."""
