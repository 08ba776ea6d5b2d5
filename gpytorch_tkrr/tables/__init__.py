"""Tables as people have them: files of columns, what the columns are, and the task that a target stands for."""
