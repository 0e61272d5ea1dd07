"""The paper's tables and figures, reproduced by `calm reproduce`."""
