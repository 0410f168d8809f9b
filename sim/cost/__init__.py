"""What plans cost: fitted constants, the forms that use them, lanes and their pricing."""
