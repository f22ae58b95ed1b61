#include <stdint.h>
#include <stdio.h>

#include "cubist/c.h"

static float a[256 * 512], b[512 * 128], c[256 * 128];

int main(void) {
  for (int i = 0; i < 256 * 512; ++i) a[i] = 1;
  for (int i = 0; i < 512 * 128; ++i) b[i] = 0.5f;
  cubist_matmul_args args = CUBIST_MATMUL_ARGS;
  args.a = cubist_input(a, CUBIST_F32, 2, (int64_t[]){256, 512});
  args.b = cubist_input(b, CUBIST_F32, 2, (int64_t[]){512, 128});
  args.c = cubist_output(c, CUBIST_F32, 2, (int64_t[]){256, 128});

  cubist_device* host = NULL;
  if (cubist_device_host(NULL, &host) != CUBIST_OK || cubist_matmul(host, &args, NULL) != CUBIST_OK) {
    fprintf(stderr, "%s\n", cubist_last_error());
    return 1;
  }
  printf("c(0, 0) = %g\n", c[0]);
  cubist_device_destroy(host);
  return c[0] == 256 ? 0 : 1;
}
