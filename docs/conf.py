"""Sphinx configuration. Pages that can be made from code or results are made here, so they cannot fall behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import write_pages  # noqa: E402

import trimtab  # noqa: E402

write_pages(HERE)

project = "trimtab"
author = "the trimtab developers"
copyright = "the trimtab developers, Apache-2.0"
release = version = trimtab.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
html_theme = "furo"
html_title = "trimtab"
html_static_path: list[str] = []
exclude_patterns = ["_build", "tutorials/GALLERY_HEADER.rst", "tutorials/README.rst"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
suppress_warnings = ["config.cache"]
sphinx_gallery_conf = {
    "examples_dirs": [str(HERE.parent / "tutorials")],
    "gallery_dirs": ["tutorials"],
    "filename_pattern": r"/\d\d_",
    "ignore_pattern": r"__init__",
    "image_scrapers": (),
    "reset_modules": (),
    "plot_gallery": True,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "min_reported_time": 0,
    "within_subsection_order": "FileNameSortKey",
}
