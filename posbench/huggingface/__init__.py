"""Models of HuggingFace's transformers: trained elsewhere and evaluated here, or trained here and taken there."""
