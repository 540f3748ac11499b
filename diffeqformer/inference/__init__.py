"""Using a trained model: scoring text and generating it."""
