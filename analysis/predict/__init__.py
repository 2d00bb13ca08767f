"""How long will a step take: a schedule of the pipeline's tasks on its threads."""
