"""What a trained model is used for: scoring text and writing it."""
