"""`python -m jaxinfer` is the same as `jaxinfer`."""

from jaxinfer.cli.main import main

raise SystemExit(main())
