"""The documentation site: `make docs` builds it into build/site. Links that lead nowhere fail."""

import fivefold

project = "fivefold"
version = release = fivefold.__version__
extensions = ["myst_parser"]
exclude_patterns = ["figures"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Choose, run and prove a five-way split of large-model training",
    "page_width": "1100px",
    "fixed_sidebar": True,
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4
nitpicky = True
