"""What plans say of blocks, carried out on block ids: `placement` reads the changes of a plan, the others keep ids."""
