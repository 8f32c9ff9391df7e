"use strict";
// Draws the charts, and tells the values under the pointer.
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 240;
let plots = [];

function readColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawMarks(plot) {
  const context = plot.ctx, ratio = devicePixelRatio, { left, top, width, height } = plot.bbox;
  context.save();
  for (const mark of data.marks) {
    const x = plot.valToPos(mark.step, "x", true);
    if (x < left || x > left + width) continue;
    const isTick = mark.kind === "snapshot";
    context.strokeStyle = readColour(isTick ? "--note" : "--restart");
    context.lineWidth = ratio;
    context.setLineDash(isTick ? [] : [4 * ratio, 3 * ratio]);
    context.beginPath();
    context.moveTo(x, isTick ? top + height - 6 * ratio : top);
    context.lineTo(x, top + height);
    context.stroke();
  }
  context.restore();
}

function findMark(plot, index) {
  const step = plot.data[0][index];
  const near = (plot.scales.x.max - plot.scales.x.min) / 100;
  const marks = data.marks.filter((mark) => Math.abs(mark.step - step) <= near);
  return marks.map((each) => "  " + each.label).join(",");
}

function draw(figure, chart) {
  const tables = chart.series.map((series) => [series.x, series.y]);
  const aligned = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const axis = { stroke: readColour("--note"), grid: { stroke: readColour("--line"), width: 1 }, ticks: { show: false } };
  const box = document.createElement("div");
  figure.append(box);
  const steps = (plot, value, _, index) => (value == null ? "--" : String(value) + findMark(plot, index));
  const series = chart.series.map((each) => ({
    label: each.label, stroke: each.colour, width: 1.5, points: { show: each.x.length < 50 },
    value: (_, value) => (value == null ? "--" : Number(value.toPrecision(6))),
  }));
  const options = {
    width: figure.clientWidth, height: HEIGHT, cursor: { sync: { key: "step" } },
    scales: { x: { time: false } }, axes: [axis, { ...axis, size: 64, values: (_, splits) => splits.map((each) => Number(each.toPrecision(6))) }],
    series: [{ label: "step", value: steps }, ...series], hooks: { draw: [drawMarks] },
  };
  plots.push([figure, new uPlot(options, aligned, box)]);
}

function drawAll() {
  for (const [, plot] of plots) {
    plot.root.parentNode.remove();
    plot.destroy();
  }
  plots = [];
  document.querySelectorAll("figure.chart").forEach((figure, number) => draw(figure, data.charts[number]));
}

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => {
  for (const [figure, plot] of plots) plot.setSize({ width: figure.clientWidth, height: HEIGHT });
});
