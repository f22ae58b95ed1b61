// Plot: a line through points, as SVG.
#ifndef CUBIST_TOOLS_PLOT_H_
#define CUBIST_TOOLS_PLOT_H_

#include <string>
#include <utility>
#include <vector>

namespace cubist {

struct Plot {
  std::string title, x, y;
  bool log_x = false;
  // x as text, and y. Where an x is no number, points stand side by side. The line has a gap where y is NaN.
  std::vector<std::pair<std::string, double>> points = {};
};

// A picture of its own, 800 x 480.
std::string PlotSvg(const Plot& plot);

// Text as XML and HTML take it.
std::string XmlEscaped(const std::string& text);

}  // namespace cubist

#endif  // CUBIST_TOOLS_PLOT_H_
