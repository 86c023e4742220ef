"""Sphinx's settings; `docs/build_site.py` gives it the pages."""

project = "PORT agent"
author = copyright = "PORT agent contributors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "PORT agent"
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["misc.highlighting_failure"]  # shell lines that are cut with [...] in the documents
nitpicky = True
