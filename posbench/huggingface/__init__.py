"""Models of HuggingFace's transformers: evaluation of models trained elsewhere, and
export of posbench's.
"""
