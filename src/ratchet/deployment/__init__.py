"""Promoted models in directories that servers read: releases, the link to the current one, and what they need."""
