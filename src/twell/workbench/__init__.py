"""The workbench: measure, analyse, evaluate, serve, and the command line. The library never imports it."""
