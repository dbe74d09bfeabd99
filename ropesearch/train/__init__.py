"""Mixed-length fine-tuning: short rows under the plain table, long rows under the searched one."""
