"""The evaluation: methods, their figures with intervals, the record and the page."""
