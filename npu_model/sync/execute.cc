#include "npu_model/sync/execute.h"

namespace cubist::sync {

bool Execute(const trace::Record& record, const Plan& plan, Schedule schedule, unsigned seed,
             trace::GmImage* gm) {
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const trace::Phase& phase = record.phases[p];
    const int lanes = phase.vector_only ? 1 : record.chip.vector_per_cube;
    for (std::size_t c = 0; c < phase.cores.size(); ++c) {
      trace::Interpreter machine(record.chip, phase.cores[c], *gm);
      Scheduler<trace::Interpreter> run(record.chip, phase.cores[c], plan.phases[p].cores[c], lanes, machine);
      if (!run.Run(schedule, ++seed)) return false;
    }
  }
  return true;
}

}  // namespace cubist::sync
