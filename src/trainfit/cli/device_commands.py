"""The commands about machines and devices, not about a step: `calibrate` and `devices`."""

from __future__ import annotations

from trainfit.cli import cli_options as given
from trainfit.cli.amount_options import amount_now
from trainfit.cli.cli_running import present, working


def calibrate(
    *,
    device: given.CalibratedDevice = None,
    output: given.DeviceOutput = None,
    minutes: given.Minutes = 3.0,
    outputs: given.OutputFlags,
) -> None:
    """Measure this machine's GPU or processor, and write a device file that replaces the table's figures.

    Runs matrix products, copies, reductions, gathers, convolutions and
    attention by dtype and layout, tiny steps that wait for the host, and a few
    real training steps, which show how good predictions with the new figures
    are. Figures are medians of several rounds, with their spread. Nothing else
    should run meanwhile; the result says so if something did.

    [bold]Examples[/bold]

      trainfit calibrate -o my-gpu.json
      trainfit estimate gpt2 --batch 8 --device my-gpu.json
      trainfit calibrate --device cpu --minutes 1 -o cpu.json --json figures.json

    The file can be used on another machine, to ask about this one. No GPU has
    run this command yet: its CUDA side was tested with a stand-in. The file
    says so, too.
    """
    with working(outputs, output=output):
        from trainfit.api.gauge_machine import calibrate_machine
        from trainfit.devices.device_file import save_device
        from trainfit.report.calibrations import calibration_data
        from trainfit.report.text_calibrations import calibration_view

        result = calibrate_machine(device, minutes)
    if output is not None:
        save_device(result.device, output)
    present(outputs, calibration_data(result, output), calibration_view, result)


def devices(name: given.DeviceArgument = None) -> None:
    """List the devices that --device knows, or everything known about one.

    [bold]Examples[/bold]

      trainfit devices
      trainfit devices "NVIDIA H100 80GB HBM3"
      trainfit devices my-device.json
    """
    from trainfit.devices.device_table import find_device, known_devices
    from trainfit.report.tables import show
    from trainfit.report.text_devices import device_view, devices_view

    amount = amount_now.get()
    show(devices_view(known_devices(), amount) if name is None else device_view(find_device(name), amount))
