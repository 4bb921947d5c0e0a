"""``paceline explain``: what a file means, line by line, before anything is loaded."""
