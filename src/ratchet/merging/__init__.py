"""Adapter and base become one: tensor by tensor, from the files of the one to the files of the other."""
