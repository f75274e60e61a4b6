"""trimtab: train large language models on an even keel.

`import trimtab` needs no extra and no accelerator. The verbs live in `trimtab.cli`; `trimtab --help` lists them.
"""

__version__ = "0.1.0"
