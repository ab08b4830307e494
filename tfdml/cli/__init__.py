"""The subcommands of `tfdml`; `tfdml_command` starts them."""
