"""Sphinx's settings; `docs/build_site.py` gives it the pages."""

project = "PORT agent"
author = copyright = "PORT agent contributors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "PORT agent"
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
highlight_language = "text"  # most blocks are commands and what they print
smartquotes = False  # or `--ram` in a heading becomes a dash
nitpicky = True
