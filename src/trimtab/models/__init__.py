"""Models: the Llama-family decoder of our own, its presets, and the ways in and out of other people's files.

`architecture` is torch-free. `hf.AutoModel` and `gguf` need `trimtab[hf]`.
"""
