#include <peerlane/tiles/roles.cuh>
