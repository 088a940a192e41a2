"""Job: the commands as functions; a job directory opened, its rows run, its state told."""
