"""Spark jobs over what the cluster exports."""
