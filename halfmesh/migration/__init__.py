"""From other engines to halfmesh: their configs (`halfmesh convert-config`), and the names of Colossal-AI."""
