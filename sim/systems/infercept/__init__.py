"""InferCept: requests that pause for tools, and what is least wasted meanwhile."""
