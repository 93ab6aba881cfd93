"""Answers to prompts: batch generation, chat, backends, and the selection of answers as training data."""
