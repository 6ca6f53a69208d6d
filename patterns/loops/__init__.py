"""How loops over experts are found in a graph, and put into the grouped form."""
