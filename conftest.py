pytest_plugins = ["tests.helpers"]  # its fixtures serve the tests of all rooms
