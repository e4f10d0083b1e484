#include <peerlane/collectives/strided.cuh>
