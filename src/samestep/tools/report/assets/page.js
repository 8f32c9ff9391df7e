"use strict";
// Draws the charts and the heat maps, and tells the value under the pointer.
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

// Dark violet to yellow, evenly spaced and readable without colour vision: viridis (Smith and van der Walt, 2015).
const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99],
  [170, 220, 50], [253, 231, 37],
];

function findColour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1), low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[low].map((each, channel) => each + (place - low) * (VIRIDIS[low + 1][channel] - each));
}

document.querySelectorAll("figure.map").forEach((figure, number) => {
  const map = data.maps[number], canvas = figure.querySelector("canvas"), note = figure.querySelector(".note");
  const words = note.textContent, columns = map.edges.length - 1, [low, high] = map.scale;
  canvas.width = columns;
  canvas.height = map.ranks.length;
  canvas.style.height = `${Math.min(Math.max(map.ranks.length * 14, 28), 480)}px`;
  const image = new ImageData(columns, map.ranks.length);
  map.ranks.flat().forEach((value, cell) => {
    if (value != null) image.data.set([...findColour((value - low) / (high - low)), 255], 4 * cell);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.addEventListener("mousemove", (event) => {
    const column = Math.min(Math.max(Math.floor((event.offsetX / canvas.clientWidth) * columns), 0), columns - 1);
    const rank = Math.min(Math.max(Math.floor((event.offsetY / canvas.clientHeight) * map.ranks.length), 0), map.ranks.length - 1);
    const value = map.ranks[rank][column];
    note.textContent = `rank ${rank}, steps ${map.edges[column]} to ${map.edges[column + 1] - 1}: ` + (value == null ? "no data" : `${value} ms`);
  });
  canvas.addEventListener("mouseleave", () => { note.textContent = words; });
});
