#include <peerlane/tiles/tile.cuh>
