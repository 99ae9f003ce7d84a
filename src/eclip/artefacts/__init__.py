"""The artefacts: frozen structs that are also files, and what they are made of."""
