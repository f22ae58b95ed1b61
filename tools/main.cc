#include "cubist/command.h"

int main(int argc, char** argv) { return cubist::CommandMain(argc, argv); }
