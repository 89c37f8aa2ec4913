"""Mixture of heads: attention in which a router chooses some heads for each token."""
