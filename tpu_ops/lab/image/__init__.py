"""The image behind the lab's workers: how it is built, and the programs that live in it."""
