"""Folders of pretrained models in Hugging Face's format: their config.json, weights and names in our terms."""
