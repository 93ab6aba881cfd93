"""Scores of models: the evaluator, lm-evaluation-harness, metrics, the judge, and the analysis of answers."""
