"use strict";
// Replaces the static charts by ones with a cursor, and tells the cell of a heat map under the pointer.
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 240;
let plots = [];

function readColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawMarks(plot) {
  const context = plot.ctx, ratio = devicePixelRatio, { left, top, width, height } = plot.bbox;
  context.save();
  context.font = `${11 * ratio}px sans-serif`;
  context.textAlign = "left";
  context.fillStyle = readColour("--note");
  data.bands.forEach((band, number) => {
    const [first, last] = [band.first, band.last].map(
      (step) => Math.min(Math.max(plot.valToPos(step, "x", true), left), left + width));
    if (last <= first) return;
    context.globalAlpha = number % 2 ? 0.12 : 0;
    context.fillRect(first, top, last - first, height);
    context.globalAlpha = 1;
    context.fillText(band.label, first + 4 * ratio, top + 11 * ratio, Math.max(last - first - 8 * ratio, 1));
  });
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
  const step = plot.data[0][index], band = data.bands.findLast((each) => each.first <= step);
  const near = (plot.scales.x.max - plot.scales.x.min) / 100;
  const marks = data.marks.filter((mark) => Math.abs(mark.step - step) <= near);
  const labels = [...(band ? [band] : []), ...marks].map((each) => each.label);
  return labels.length ? "  " + labels.join(", ") : "";
}

function draw(figure, chart) {
  const tables = chart.series.map((series) => [series.x, series.y]);
  const aligned = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const axis = { stroke: readColour("--note"), grid: { stroke: readColour("--line"), width: 1 }, ticks: { show: false } };
  const box = document.createElement("div");
  box.className = "plot";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
  figure.append(box);
  figure.classList.add("drawn");
  const steps = (plot, value, _, index) => (value == null ? "--" : String(value) + findMark(plot, index));
  const series = chart.series.map((each) => ({
    label: each.label, stroke: each.colour, dash: each.dash, width: each.width, points: { show: each.x.length < 50 },
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
  for (const [figure, plot] of plots) {
    plot.root.parentNode.remove();
    plot.destroy();
    figure.classList.remove("drawn");
  }
  plots = [];
  document.querySelectorAll("figure.chart").forEach((figure, number) => draw(figure, data.charts[number]));
}

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => {
  for (const [figure, plot] of plots) plot.setSize({ width: figure.clientWidth, height: HEIGHT });
});

document.querySelectorAll("figure.map").forEach((figure) => {
  const map = data.maps[Number(figure.dataset.number)], image = figure.querySelector("img"), note = figure.querySelector(".note");
  const words = note.textContent, columns = map.edges.length - 1;
  image.addEventListener("mousemove", (event) => {
    const column = Math.min(Math.max(Math.floor((event.offsetX / image.clientWidth) * columns), 0), columns - 1);
    const rank = Math.min(Math.max(Math.floor((event.offsetY / image.clientHeight) * map.ranks.length), 0), map.ranks.length - 1);
    const value = map.ranks[rank][column];
    note.textContent = `rank ${rank}, steps ${map.edges[column]} to ${map.edges[column + 1] - 1}: ` + (value == null ? "no data" : `${value} ms`);
  });
  image.addEventListener("mouseleave", () => { note.textContent = words; });
});
