#include "tools/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>

namespace cubist {
namespace {

constexpr double kWidth = 800, kHeight = 480, kLeft = 80, kRight = 30, kTop = 50, kBottom = 60;

// Where each point stands along x, from 0 to 1.
std::vector<double> Places(const Plot& plot) {
  std::vector<double> xs;
  bool numbers = true;
  for (const auto& [text, y] : plot.points) {
    double x = 0;
    const auto [next, error] = std::from_chars(text.data(), text.data() + text.size(), x);
    numbers = numbers && error == std::errc() && next == text.data() + text.size() && (!plot.log_x || x > 0);
    xs.push_back(plot.log_x && x > 0 ? std::log(x) : x);
  }
  if (!numbers) {
    for (std::size_t i = 0; i < xs.size(); ++i) xs[i] = static_cast<double>(i);
  }
  const auto [least, most] = std::minmax_element(xs.begin(), xs.end());
  const double low = xs.empty() ? 0 : *least, range = xs.empty() || *most <= low ? 1 : *most - low;
  for (double& x : xs) x = (x - low) / range;
  return xs;
}

// A round number of at least `value`.
double RoundUpNicely(double value) {
  if (value <= 0) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double nice : {1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0}) {
    if (value <= nice * power) return nice * power;
  }
  return value;
}

}  // namespace

std::string XmlEscaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '&') {
      escaped += "&amp;";
    } else if (c == '<') {
      escaped += "&lt;";
    } else if (c == '>') {
      escaped += "&gt;";
    } else if (c == '"') {
      escaped += "&quot;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string PlotSvg(const Plot& plot) {
  double most = 0;
  for (const auto& [x, y] : plot.points) most = std::max(most, std::isnan(y) ? 0 : y);
  const double top = RoundUpNicely(most);
  const std::vector<double> places = Places(plot);
  const auto x_of = [](double share) { return kLeft + share * (kWidth - kLeft - kRight); };
  const auto y_of = [&](double y) { return kHeight - kBottom - y / top * (kHeight - kTop - kBottom); };

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"28\" font-size=\"16\">{3}</text>\n",
      kWidth, kHeight, kLeft, XmlEscaped(plot.title));
  for (int i = 0; i <= 4; ++i) {
    const double y = top * i / 4;
    svg += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>"
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n",
        kLeft, kWidth - kRight, y_of(y), y_of(y), kLeft - 8, y_of(y) + 4, y);
  }
  std::string line;
  const auto draw_line = [&] {
    if (line.empty()) return;
    svg +=
        fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"#2563eb\" stroke-width=\"2\"/>\n", line);
    line.clear();
  };
  for (std::size_t i = 0; i < places.size(); ++i) {
    const bool drawn = !std::isnan(plot.points[i].second);
    const double x = x_of(places[i]), y = y_of(plot.points[i].second);
    svg += fmt::format(
        "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\" font-size=\"11\" fill=\"{}\">{}</text>\n", x,
        kHeight - kBottom + 18, drawn ? "black" : "#aaa", XmlEscaped(plot.points[i].first));
    if (!drawn) {
      draw_line();
      continue;
    }
    line += fmt::format("{:.1f},{:.1f} ", x, y);
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#2563eb\"><title>{}: {:.4g}</title></circle>\n",
        x, y, XmlEscaped(plot.points[i].first), plot.points[i].second);
  }
  draw_line();
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", kWidth / 2, kHeight - 12,
                     XmlEscaped(plot.x));
  svg += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n</svg>\n", 12, kTop - 4, XmlEscaped(plot.y));
  return svg;
}

}  // namespace cubist
