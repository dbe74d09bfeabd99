"""A small real model and its texts: `train` makes it, `measure` measures it, the package itself run writes it out."""
