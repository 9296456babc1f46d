"""The step loop: scheduler decides, runner touches the device, engine joins them."""
